"""`megabatch bench` and `megabatch tune`: losses side by side, and the kernels' fastest launches.

Adding a peer is an entry in `contenders`; nothing else knows them by name.
"""
