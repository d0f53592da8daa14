"""Where a run's figures go. One file per tracker."""
