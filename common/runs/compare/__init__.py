"""Comparison of finished and running runs as a text table and an HTML page. This package does not import torch.

`compare_table` formats the table. `compare_page` renders the page from the templates in page/. `metric_curves` computes
the curves, `metric_names` names them, and `curve_styles` distinguishes them. `setting_labels` names the settings that
differ between runs. slurm/reports/compare.py selects the runs.
"""
