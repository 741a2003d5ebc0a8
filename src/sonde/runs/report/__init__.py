"""A run's report: one HTML page with sections, verdicts, plots and tables."""
