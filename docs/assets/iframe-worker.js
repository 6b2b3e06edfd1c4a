// The search of the site runs in a worker. Browsers start none for pages that are read from a disk, so there the
// worker's script runs in a hidden frame, which loads nothing but this site's own files.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (source) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = () => failed(new Error(`cannot load ${source}`));
        inside.document.body.append(script);
      });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...sources) => { for (const one of sources) await load(new URL(one, url)); };
      this.deliver = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.deliver(data));
    }
  };
}
