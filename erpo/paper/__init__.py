"""Scores and training logs to tables, figures, the comparison with the paper, and the report."""
