"""One frozen backbone and the pool of adapters attached to it; adapters in and out as PEFT
directories."""
