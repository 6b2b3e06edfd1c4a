"""The server as a deployment of Ray Serve. Settings are variables of the environment, see `ServingSettings`.

    pip install '.[serve]' 'ray[serve]'
    MANYHEADS_MODELS=/models/en-de MANYHEADS_REPLICAS=2 serve run ray_serve:app

Each replica loads the models when it starts; a replica that cannot load them is not used. Deadlines for slow clients,
and limits on connections, are those of Ray's proxy. `/metrics` is of one replica.
"""

from __future__ import annotations

import os

from ray import serve

from manyheads.extras.serving.app import create_app

app = serve.deployment(
    serve.ingress(create_app)(),
    name="manyheads",
    num_replicas=int(os.environ.get("MANYHEADS_REPLICAS", "1")),
    max_ongoing_requests=64,  # with Ray's 5 the batches would stay small
    max_queued_requests=256,
    graceful_shutdown_timeout_s=65,
    health_check_period_s=2,
    health_check_timeout_s=10,
).bind()
