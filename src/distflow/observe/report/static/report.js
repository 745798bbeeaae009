// The page of a run's report. The other scripts of this folder come before this one.

startTheme();
showTop();
showFailure();
showProblems();
showCompare();
showCharts();
new Samples();
showStepTimes();
showLog();
showSetup();
showContents();
root.dataset.ready = String(charts.length);
