"""Hold the contents of a cache: layers, storage and seen tokens; report them and save them."""
