"""The methods of the literature, as compositions of parts."""
