"""Define the commands of `kvpolicy`, one file each, and their terminal output."""
