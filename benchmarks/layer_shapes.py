"""The groups of linears of a Llama decoder layer: what goes in, and what comes out of each."""

SHAPES = {
    "8b": {
        "qkv": (4096, (4096, 1024, 1024)),
        "o": (4096, (4096,)),
        "gate_up": (4096, (14336, 14336)),
        "down": (14336, (4096,)),
    },
    "1b": {
        "qkv": (2048, (2048, 512, 512)),
        "o": (2048, (2048,)),
        "gate_up": (2048, (8192, 8192)),
        "down": (8192, (2048,)),
    },
}
