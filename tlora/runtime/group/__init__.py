"""`tlora train --plan`: one super-model over several ranks, in lock-step."""
