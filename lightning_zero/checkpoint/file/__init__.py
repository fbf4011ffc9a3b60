"""The plain file that ``torch.save`` would have written, by all ranks at once.

============== ====================================================================================
file_save      ``FileSave``: a save to one file, also streamed through rank 0
skeleton       a checkpoint as one pickle and the storages it refers to
archive        where every byte of the file lies, and its checksums: arithmetic
records        the records of a file that is read, with their checksums
writer         writing at offsets of a file, large parts by direct I/O
atomic         temporary files and folders that get their names once they are complete
format         names of records and files, and the record of a checkpoint's origin
============== ====================================================================================
"""
