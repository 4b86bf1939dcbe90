"""Pipeline parallelism: partition, schedules, the built-in executor, torch's engine, messages and the report.

The module `schedules` represents a schedule as plain data, `executor` executes the actions of a schedule, and `p2p`
derives the messages from the schedule.
"""
