"""From a user's files to token sequences with labels: read, recognise, render, tokenise, keep.

`prepare` is the entry. Nothing here knows of models, devices or torch.
"""
