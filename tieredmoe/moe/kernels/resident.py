"""One token whose experts are all in their slots: a layer in four launches, for a captured graph.

``DeviceRoutedBatch`` decides on the host which experts to launch; here nothing depends on what was
chosen, so one recording serves every token, whatever its experts and wherever they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.moe.kernels.launches import Launches
from tieredmoe.moe.kernels.plan import expert_plan

if TYPE_CHECKING:
    import torch

    from tieredmoe.moe.activation import FusedActivation
    from tieredmoe.moe.kernels.workspace import Workspace
    from tieredmoe.spec import ExpertLayout


def execute_resident(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: FusedActivation,
    *,
    layout: ExpertLayout,
    arena: torch.Tensor,
    slot_of: torch.Tensor,
    workspace: Workspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed sum of one token, float32 [1, H], bit for bit what ``DeviceRoutedBatch`` makes.

    Arguments are those of ``DeviceRoutedBatch`` with T = 1, read when the kernels run: nothing here
    waits for the device, and the calls may be captured. The result is in ``out``, contiguous, where
    given; else in the workspace until the next batch. Every chosen expert must be resident when the
    kernels run (one that is not leaves an earlier token's rows in the sum), and ``layout`` must
    have kernels (``expert_plan(layout).has_kernels``).
    """
    assert ids.shape == (1, workspace.top_k), (ids.shape, workspace)
    plan = expert_plan(layout)
    assert plan.has_kernels, f"no kernels for all roles of {layout}"
    launches = Launches(
        plan,
        activation,
        ids=ids,
        arena=arena,
        slot_of=slot_of,
        workspace=workspace,
        is_sorted=False,
    )
    launches.take(x)
    launches.run(range(workspace.top_k), n_together=1)
    return launches.combine(weights, x.shape[1], out)
