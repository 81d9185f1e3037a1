"""The code that compares kvpolicy with kvpress, on made-up inputs: kvpress is not needed."""
