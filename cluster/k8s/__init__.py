"""Manifests for KubeRay: rendered, checked for what no schema says, and written for a configuration."""
