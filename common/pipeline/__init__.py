"""Pipeline parallelism: schedules, the built-in executor, torch's engine, messages and the report.

A schedule is plain data (see the module `schedules`). The module `executor` executes a schedule, and the module `p2p`
derives the messages of a schedule.
"""
