"""One package per technique of distributed training. No other package of `common` imports a technique.

Experiments import techniques, and `slurm.scheduling.elastic_launcher` imports the supervisor of elastic runs. A
technique imports another one only through a module named `api`. See common/README.md for how a technique plugs in.
"""
