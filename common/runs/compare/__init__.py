"""The table and the page that compare runs. Imports no torch."""
