"""The commands of `kvpolicy`, one file each, and the terminal they print to."""
