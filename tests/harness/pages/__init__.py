"""The commands and figures of the pages."""
