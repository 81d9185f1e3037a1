"""Answer lm-evaluation-harness tasks under many policies, cell by cell, into a folder."""
