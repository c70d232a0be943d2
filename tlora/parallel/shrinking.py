"""The plan to go on with when a rank is lost."""

from dataclasses import replace

from tlora.core.plan import Plan


def smaller(plan: Plan) -> Plan | None:
    """One copy of the base less, or one shard less where there is one copy; None if there is
    nothing left to give up. What must fit memory is not known here."""
    if plan.replicas > 1:
        return replace(plan, replicas=plan.replicas - 1)
    if plan.fsdp > 1:
        # Larger shards leave less room for layers that stay gathered.
        return replace(plan, fsdp=plan.fsdp - 1, kept_layers=0)
    return None
