"""The plain file that ``torch.save`` would have written, from all ranks at once.

============== ====================================================================================
save           ``FileSave``: the file as the format of a save, or streamed through rank 0
skeleton       a checkpoint as one pickle and the storages it refers to
archive        where every byte of the file lies, and its checksums: arithmetic
records        the records of a file that is read, with their checksums
writer         writing at places of a file, past the system's cache
atomic         temporary files and folders that get their names when they are whole
format         names of records and files, the record of a checkpoint's origin
============== ====================================================================================
"""
