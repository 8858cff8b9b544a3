"""`megabatch bench`: losses side by side.

Adding a peer is an entry in `contenders`; nothing else knows them by name.
"""
