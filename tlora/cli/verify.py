"""`tlora verify`."""

from tlora.cli.options import AdapterDirectory, BaseModel
from tlora.cli.output import print_lines


def verify(adapter: AdapterDirectory, base: BaseModel = None) -> None:
    """Load an adapter onto its base model: keys, shapes and logits."""
    # torch loads with this.
    from tlora.runtime.verifying import verify_adapter

    print_lines(verify_adapter(adapter, base))
