"""Directories of torch.distributed.checkpoint.

============== ====================================================================================
save           ``DirectorySave``: the directory as the format of a save
content        a Trainer's checkpoint as a directory's entries and a rest, and back
directory      reading a directory's table, whatever program wrote it
============== ====================================================================================
"""
