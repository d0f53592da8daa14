"""Trackers, which record a run's metrics: one file per tracker."""
