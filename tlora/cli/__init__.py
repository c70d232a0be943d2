"""The command line: one small module per verb. Heavy imports wait until a verb needs them."""
