"""Presentation: render a `pptrace.report.Report` or a timeline; compute nothing."""
