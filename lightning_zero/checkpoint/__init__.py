"""Saving and loading: sharded state as the plain values that DDP would have written."""
