"""`tlora verify`."""

from tlora.cli.options import AdapterDirectory, BaseModel, check_adapter
from tlora.cli.output import print_lines


def verify(adapter: AdapterDirectory, base: BaseModel = None) -> None:
    """Load an adapter onto its base model: keys, shapes and logits."""
    from tlora.config.paths import find_model

    check_adapter(adapter)
    model = find_model(base, "--base") if base else None
    # torch loads with this.
    from tlora.runtime.verifying import verify_adapter

    print_lines(verify_adapter(adapter, model))
