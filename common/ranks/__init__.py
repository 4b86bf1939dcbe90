"""Start the ranks of a run, connect them, and exchange JSON values between them.

`local_launcher` forks the ranks of this machine; `rendezvous` connects them and defines `World`. `ranks` holds the
`World` of a run, which is replaced when ranks are lost or join. `rank_info` reads the position of a rank that torchrun
or SLURM started. `objects` exchanges JSON values, `averaging` averages tensors, and `silent_ranks` names ranks that do
not respond. `backend_setup` looks up a communication backend by name; the built-in one is in `common.backend`. SLURM
jobs are started by `slurm`, not by this package.
"""
