"""pptrace: says why a pipeline-parallel job hangs."""
