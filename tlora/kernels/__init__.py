"""The arithmetic: multi-LoRA linears, packed attention, dropout streams. Each has a plain
reference."""
