"""What users do: modules, callbacks and loops with no word of ZeRO, held against DDP."""
