"""Training on text: valid target tokens, bits per byte, and the report with a sample.

The loss of a batch is the mean over its valid target tokens, regardless of how ranks and microbatches divide them.
"""
