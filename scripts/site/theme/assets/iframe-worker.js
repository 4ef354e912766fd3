/* The search runs in a worker, which browsers refuse to a page that was opened from a folder: there, a hidden frame
   stands for the worker. Served pages keep theirs. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.queue = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      window.addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return
        if (this.queue && event.data === "worker is ready") {
          this.queue.forEach(message => this.deliver(message))
          this.queue = null
        } else {
          this.dispatchEvent(new MessageEvent("message", {data: event.data}))
        }
      })
      const page = this.frame.contentWindow.document
      page.open()
      page.write(`<body><script>
        postMessage = message => parent.postMessage(message, "*")
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {
          const script = document.createElement("script")
          script.src = url
          script.onload = done
          document.body.appendChild(script)
        })), Promise.resolve())
      <\/script><script src="${url}"><\/script><script>postMessage("worker is ready")<\/script></body>`)
      page.close()
    }
    deliver(message) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data: message}))
    }
    postMessage(message) {
      if (this.queue) this.queue.push(message)
      else this.deliver(message)
    }
    terminate() {
      this.frame.remove()
    }
  }
}
