"""Directories of torch.distributed.checkpoint.

============== ====================================================================================
directory_save ``DirectorySave``: a save to a directory
content        a Trainer's checkpoint as a directory's entries and a rest, and back
directory      reading a directory's table, whichever program wrote it
============== ====================================================================================
"""
