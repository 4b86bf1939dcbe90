"""Commands that inspect or manage existing runs, such as status, logs, cancel, compare, doctor and sync."""
