"""Fixed schedules: the remedy a verdict points to."""
