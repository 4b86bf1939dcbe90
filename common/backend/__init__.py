"""The built-in backend of torch.distributed (`launch.backend=builtin`): all-reduce algorithms, TLS, and a cost model.

This package does not contain the connections between ranks (see `common.ranks.links`) and does not choose a backend;
`common.ranks.backend_setup` looks up `setup` by name. `process_group` implements the backend, and `torch_registration`
registers it with torch. `algorithms` represents all-reduce algorithms as lists of moves, which `communicator` executes.
`cost` predicts their times, and `algorithm_choice` implements `launch.algorithm=auto`.
"""
