"""Machines of AWS and Google Cloud for `ray up`: head, CPU hosts for routers, GPU hosts for the pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from cluster.config import ClusterConfig
from cluster.host_groups import ROUTER_ROLE, Group, Machine, groups
from cluster.roles import role_resource
from cluster.yaml_text import Note

Cloud = Literal["aws", "gcp"]

ROLE_AMOUNT = 1000
"""What a host has of the resource `manta_ROLE` for its role; start.sh says the same on premises."""

CLIENTS: dict[Cloud, str] = {"aws": "boto3==1.44.8", "gcp": "google-api-python-client==2.202.0"}
"""What Ray needs to speak to a cloud, beside the lock."""


class Offer(NamedTuple):
    """A machine type."""

    name: str
    machine: Machine
    local_disks: int
    """Local NVMe disks that must be asked for; on AWS they belong to the type."""


OFFERS: dict[Cloud, tuple[Offer, ...]] = {
    "aws": (
        Offer("m6id.4xlarge", Machine(16, 0), 0),
        Offer("g6e.2xlarge", Machine(8, 1), 0),
        Offer("g6e.12xlarge", Machine(48, 4), 0),
        Offer("p5.48xlarge", Machine(192, 8), 0),
    ),
    "gcp": (
        Offer("n2-standard-16", Machine(16, 0), 2),
        Offer("g2-standard-16", Machine(16, 1), 1),
        Offer("g2-standard-48", Machine(48, 4), 4),
        # Brings its sixteen local disks without being asked.
        Offer("a3-highgpu-8g", Machine(208, 8), 0),
    ),
}
"""From small to large. The first one has no GPU and serves routers and CPU engines; all have local NVMe."""

HEAD_TYPE = {"aws": "m7i.xlarge", "gcp": "n2-standard-4"}


def node_types(config: ClusterConfig, cloud: Cloud) -> dict[Any, Any]:
    """The sections of a cluster's file that are about its machines: provider, ssh, node types."""
    found = groups(config, lambda gpus: _offer(cloud, gpus).machine)
    node_config: Callable[[str, Group | None], dict[Any, Any]] = {"aws": _aws, "gcp": _gcp}[cloud]
    types: dict[Any, Any] = {
        "head": {
            "resources": {"CPU": 0},
            "min_workers": 0,
            "max_workers": 0,
            "node_config": node_config(HEAD_TYPE[cloud], None),
        }
    }
    for group in found:
        offer = _offer(cloud, group.gpus)
        resources = {"CPU": offer.machine.cpus, role_resource(group.role): ROLE_AMOUNT}
        if group.gpus:
            resources["GPU"] = offer.machine.gpus
        types |= {
            Note("\n" + _purpose(group)): None,
            group.role: {
                "min_workers": group.least,
                "max_workers": group.most,
                "resources": resources,
                "node_config": node_config(offer.name, group),
            },
        }
    return {
        **_PROVIDERS[cloud],
        Note("\nHosts without work for so long are given back, down to min_workers of their group."): None,
        "idle_timeout_minutes": 30,
        "max_workers": sum(group.most for group in found),
        "head_node_type": "head",
        Note(
            "\nRay counts CPUs and GPUs as said here; the head has none to give, so that no replica runs there."
        ): None,
        "available_node_types": types,
    }


def _purpose(group: Group) -> str:
    if group.role == ROUTER_ROLE:
        return "CPU hosts for routers, and for the proxies that clients connect to."
    kind = "GPU hosts" if group.gpus else "CPU hosts"
    advice = (
        " Losing one costs nothing but time, so they may well be spot." if group.role == "prefill" else ""
    )
    return f"{kind} for {group.role} replicas.{advice}"


def _offer(cloud: Cloud, gpus: int) -> Offer:
    """The smallest that holds a replica of so many GPUs; the largest, several times, for one that spans hosts."""
    cpu, *gpu = OFFERS[cloud]
    if gpus == 0:
        return cpu
    return next((offer for offer in gpu if offer.machine.gpus >= gpus), gpu[-1])


def _aws(instance: str, group: Group | None) -> dict[Any, Any]:
    gpu = group is not None and group.gpus > 0
    image = (
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
        if gpu
        else "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"
    )
    # Room for the packages and a model; the cache has the machine's own NVMe.
    disk = {
        "VolumeSize": 300 if gpu else 100,
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    config: dict[Any, Any] = {
        "InstanceType": instance,
        "ImageId": f"resolve:ssm:{image}",
        "KeyName": "manta",
        "SubnetIds": ["subnet-FILL-IN"],
        "SecurityGroupIds": ["sg-FILL-IN", *(["sg-ROUTER-FILL-IN"] if _for_clients(group) else [])],
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        "MetadataOptions": {"HttpTokens": "required"},
    }
    if group is None:
        return {Note("The head starts and ends machines; cluster/ray-up/aws-head-policy.json allows just that."): None,
                "IamInstanceProfile": {"Name": "manta-head"}} | config  # fmt: skip
    if gpu:
        config |= {
            Note("Near to each other, for KV between hosts."): None,
            "Placement": {"GroupName": "manta"},
        }
    return config | {
        Note("Spot, cheaper and ended at any time:\n   InstanceMarketOptions: {MarketType: spot}"): None
    }


def _gcp(machine: str, group: Group | None) -> dict[Any, Any]:
    gpu = group is not None and group.gpus > 0
    image = (
        "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-580"
        if gpu
        else "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts"
    )
    boot = {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "initializeParams": {
            "diskSizeGb": 300 if gpu else 100,
            "diskType": f"zones/{_GCP_ZONE}/diskTypes/pd-balanced",
            "sourceImage": image,
        },
    }
    local = {
        "autoDelete": True,
        "type": "SCRATCH",
        "interface": "NVME",
        "initializeParams": {"diskType": f"zones/{_GCP_ZONE}/diskTypes/local-ssd"},
    }
    disks = next((offer.local_disks for offer in OFFERS["gcp"] if offer.name == machine), 0)
    config: dict[Any, Any] = {
        "machineType": machine,
        "tags": {"items": ["manta", *(["manta-router"] if _for_clients(group) else [])]},
        "disks": [boot, *([local] * disks)],
    }
    if group is None:
        account = {"email": "manta-head@PROJECT-FILL-IN.iam.gserviceaccount.com",
                   "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}  # fmt: skip
        return config | {Note("The head starts and ends machines; other hosts have no account."): None,
                         "serviceAccounts": [account]}  # fmt: skip
    if gpu:
        config |= {
            Note("Machines with GPUs can't be moved while they run."): None,
            "scheduling": {"onHostMaintenance": "TERMINATE", "automaticRestart": True},
            Note("Near to each other, for KV between hosts, once there is such a policy:\n"
                 f"   resourcePolicies: [projects/PROJECT-FILL-IN/regions/{_GCP_REGION}/resourcePolicies/manta]"): None,
        }  # fmt: skip
    return config | {
        Note("Spot, cheaper and ended at any time, in place of another `scheduling`:\n"
             "   scheduling: {provisioningModel: SPOT, instanceTerminationAction: DELETE, "
             "onHostMaintenance: TERMINATE}"): None,
    }  # fmt: skip


def _for_clients(group: Group | None) -> bool:
    return group is not None and group.role == ROUTER_ROLE


_GCP_REGION, _GCP_ZONE = "us-central1", "us-central1-a"

_AWS_NOTE = """
FILL IN: region and zone, the key pair, and below subnet and security groups. One zone: KV crosses hosts.
Left out, Ray would make a security group that lets the whole world in by ssh, and a role for the head that may do
anything with EC2 and S3; cluster/README.md says how to make narrower ones."""

_AWS_PROVIDER: dict[Any, Any] = {
    Note(_AWS_NOTE): None,
    "provider": {
        "type": "aws",
        "region": "us-east-1",
        "availability_zone": "us-east-1a",
        Note("A stopped machine loses its local disks anyway."): None,
        "cache_stopped_nodes": False,
    },
    Note("\nThe key is copied to the head, from where the others are set up."): None,
    "auth": {"ssh_user": "ubuntu", "ssh_private_key": "~/.ssh/manta.pem"},
}

_GCP_NOTE = """
FILL IN: project, region and zone, here and in the paths below. One zone: KV crosses hosts.
Hosts carry the network tag `manta`, and those of routers `manta-router`; cluster/README.md has firewall rules for them
and the role of the head's account. `gcloud compute images list --project deeplearning-platform-release` lists the GPU
images."""

_GCP_PROVIDER: dict[Any, Any] = {
    Note(_GCP_NOTE): None,
    "provider": {
        "type": "gcp",
        "region": _GCP_REGION,
        "availability_zone": _GCP_ZONE,
        "project_id": "PROJECT-FILL-IN",
    },
    Note("\nRay makes a key on first use, adds it to the project, and copies it to the head."): None,
    "auth": {"ssh_user": "ubuntu"},
}

_PROVIDERS: dict[Cloud, dict[Any, Any]] = {"aws": _AWS_PROVIDER, "gcp": _GCP_PROVIDER}
