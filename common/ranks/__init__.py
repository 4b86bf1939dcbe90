"""Start the ranks of a run, connect them, and exchange JSON values between them.

`local_launcher` forks the ranks of this machine; `rendezvous` connects them and defines `World`.
"""
