#!/usr/bin/env bash
# On the head, on premises: tell the autoscaler that runs which hosts the cluster's file has now. It reads the file
# again by itself, but not the list of hosts in it, which it keeps in a file of its own that this brings up to date.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "$0")/../profile.sh"
python - <<'END'
import json
from pathlib import Path

from ray.autoscaler._private.local.node_provider import LocalNodeProvider

config = json.loads(Path("~/ray_bootstrap_config.yaml").expanduser().read_text())
LocalNodeProvider(config["provider"], config["cluster_name"])
END
