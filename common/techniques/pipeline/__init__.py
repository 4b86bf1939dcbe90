"""Pipeline parallelism: partition, schedules, the built-in executor, torch's engine, messages and the report.

A schedule is plain data (`schedules`); `executor` executes it and `p2p` derives its messages.
"""
