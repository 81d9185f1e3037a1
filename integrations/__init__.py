"""Where policies meet the libraries that run models."""
