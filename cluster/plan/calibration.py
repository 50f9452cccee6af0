"""Efficiencies that turn bounds into expectations. Fitted to published figures of other servers; see docs/plan.md.

`python -m bench.plan_error --fit` reproduces the numbers. They are not measurements of this server: nobody has run it
on a TPU yet. What they say is what TPU servers of today reach of the chip's peaks.
"""

from __future__ import annotations

from cluster.plan.roofline import Efficiency

EXPECTED = Efficiency(hbm=0.92, mxu=0.18, ici=0.7, step_s=3.4e-3, collective_s=5e-6)
TYPICAL_ERROR = 0.2
"""How far off expectations were on figures that were not fitted, as a share; slower servers are further off."""
