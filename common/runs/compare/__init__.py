"""The text table and the HTML page that compare runs. This package does not import torch."""
