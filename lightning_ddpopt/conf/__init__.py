"""Hydra groups for any app, found through `hydra_plugins/ddpopt`: `strategy` and `hydra/launcher=torchrun`."""
