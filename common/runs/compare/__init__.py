"""Comparison of finished and running runs as a text table and an HTML page. This package does not import torch.

`compare_table` formats the table, `compare_page` renders the page, `metric_curves` computes its curves, and
`setting_labels` names the settings in which runs differ. slurm/reports/compare.py selects the runs.
"""
