// Plays the recordings of docs/site/casts.py: a list of screens, each with its time in seconds.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const cast of document.querySelectorAll(".cast")) {
    const screen = cast.querySelector("pre");
    const screens = JSON.parse(cast.querySelector("script").textContent);
    const button = document.createElement("button");
    let timers = [];
    const stop = () => {
      timers.forEach(clearTimeout);
      timers = [];
      button.textContent = "Play";
    };
    button.addEventListener("click", () => {
      if (timers.length) {
        stop();
        screen.innerHTML = screens[screens.length - 1][1];
        return;
      }
      button.textContent = "Stop";
      screen.style.minHeight = `${screen.offsetHeight}px`;
      timers = screens.map(([at, text], index) =>
        setTimeout(() => {
          screen.innerHTML = text;
          if (index === screens.length - 1) stop();
        }, at * 1000)
      );
    });
    stop();
    cast.prepend(button);
  }
});
