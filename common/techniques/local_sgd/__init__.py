"""Local SGD: workers train alone for several steps, and then average their parameters.

`worker.LocalWorker` exchanges parameter changes, `exchange` and `powersgd` define their compression, and
`state.LocalState` saves each worker's parameters. The outer step, which is the method, is in experiments/local_sgd.py.
"""
